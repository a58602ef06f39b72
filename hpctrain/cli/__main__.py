"""`python -m hpctrain.cli`, for where the console script is not on PATH."""

from hpctrain.cli import main

if __name__ == "__main__":
    main()
