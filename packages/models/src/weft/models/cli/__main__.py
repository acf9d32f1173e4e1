"""`python -m weft.models.cli` is `weft`."""

from . import main

if __name__ == "__main__":
    main()
