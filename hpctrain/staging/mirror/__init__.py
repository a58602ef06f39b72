"""Mirrors: copies of a set's chunks in directories of the node (`mirror`), what is in them (`found`), and parts."""

from hpctrain.staging.mirror.found import MirrorStatus, mirrors_under, remove_mirror
from hpctrain.staging.mirror.mirror import Mirror
from hpctrain.staging.mirror.reader import DamagedChunkError
from hpctrain.staging.mirror.record import OnChanged

__all__ = ["DamagedChunkError", "Mirror", "MirrorStatus", "OnChanged", "mirrors_under", "remove_mirror"]
