"""The one error that a user of this package can cause."""


class ModelConfigError(ValueError):
    """A model configuration that cannot be built; the message names the field, its value and what would work."""
