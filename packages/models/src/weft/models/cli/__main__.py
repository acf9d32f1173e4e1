"""`python -m weft.models.cli` runs `weft`."""

from . import main

if __name__ == "__main__":
    main()
