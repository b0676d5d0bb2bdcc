"""The errors a user can cause. Each message says what was expected, what came and what to type instead."""


class SpecError(ValueError):
    """A spec text, a knob or a size is wrong: unknown name or knob, wrong type, out of range."""


class IncompatibleError(ValueError):
    """An attention, a position encoding and a site that cannot be combined, with the reason and an alternative."""


class TaskError(ValueError):
    """A task cannot be made from the data or knobs it was given."""


class StoreError(ValueError):
    """A run folder cannot be used: it is missing, is no run, cannot be written to, or holds other data."""
