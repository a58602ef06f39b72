"""The cold tier (`tier`): sets go to an archive directory and come back, maybe recompressed, with every value as it was."""
