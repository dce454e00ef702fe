"""The design's fixtures on the real package (test_mutations.py runs the same checks on broken copies)."""

from __future__ import annotations

import pytest

from tests.decoding import checks
from tests.decoding.mutants import real_package

CHECKS = sorted(name for name in dir(checks) if name.startswith("check_"))


@pytest.mark.parametrize("name", CHECKS)
def test_fixture(name: str) -> None:
    getattr(checks, name)(real_package())
