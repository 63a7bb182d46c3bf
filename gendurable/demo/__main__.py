"""Runs the story."""

import sys

from gendurable.demo.story import main

sys.exit(main())
