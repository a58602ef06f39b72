"""Preprocessing at load time: from a batch in the stored types to the one the Task gets.

It runs in the loader's threads, on NumPy and Pillow, which let other threads work meanwhile; what a sample becomes
depends on (seed, epoch, sample) alone.
"""

from hpctrain.data.preprocess.draws import PREPROCESS_VERSION
from hpctrain.data.preprocess.field import LENGTH_SUFFIX, FieldPreprocessor
from hpctrain.data.preprocess.preprocessor import Preprocessor
from hpctrain.data.preprocess.samples import Rows, SampleFunction
from hpctrain.data.preprocess.steps import FieldSteps

__all__ = [
    "LENGTH_SUFFIX",
    "PREPROCESS_VERSION",
    "FieldPreprocessor",
    "FieldSteps",
    "Preprocessor",
    "Rows",
    "SampleFunction",
]
