"""A first look at gendurable: machines to play with, and a story that runs them. `python -m gendurable.demo`."""
