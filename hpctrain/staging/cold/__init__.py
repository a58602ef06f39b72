"""The cold tier (`tier`): sets go to an archive directory and come back, maybe recompressed, every value as it was."""
