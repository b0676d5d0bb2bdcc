"""`python -m anyformer` is the command line."""

from anyformer.cli.main import main

if __name__ == "__main__":
    main()
