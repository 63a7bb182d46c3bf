"""For tests of machines: values for unit tests, and a harness over a real Postgres."""

from gendurable.errors import RunawayError
from gendurable.testing.build import child, context, signal
from gendurable.testing.harness import Harness

__all__ = ["Harness", "RunawayError", "child", "context", "signal"]
