"""The load generator behind `gendurable bench`: what one server and one worker carry, beside what they could."""
