"""Whatever happens to the shaper, no request is lost, doubled, late or needlessly held."""

from hypothesis import settings
from shaper_machine import ShaperMachine

TestShaper = ShaperMachine.TestCase
TestShaper.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
