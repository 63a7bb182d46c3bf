"""`python -m gendurable`: the command line."""

from gendurable.cli import main

if __name__ == "__main__":
    main()
