import pytest

# They assert too, and are no test modules.
pytest.register_assert_rewrite("tests.slurm.lab", "tests.slurm.scenarios")
