"""The public path of `InputError`, which stands in `ground`."""

from forebay.traces.ground.errors import InputError as InputError
