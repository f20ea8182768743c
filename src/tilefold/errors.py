"""Everything this library raises on purpose.

    TilefoldError
    ├── ArgumentError (ValueError)        a bad value: shape, range, dtype, device
    │   ├── ShapeError                    sizes that do not fit together
    │   ├── DtypeError                    dtypes that do not fit together
    │   ├── DeviceError                   tensors on different devices
    │   ├── MaskError                     a mask that does not fit the call it is used in
    │   └── CapacityError                 more fast memory or pages of a cache are needed than there are
    ├── ArgumentTypeError (TypeError)     the wrong kind of object
    ├── BackendError (ValueError)         a backend asked for by name cannot run this call
    └── DerivativeError (NotImplementedError)   a derivative that does not exist here

Messages have one form: `<argument>: expected <what>, got <what came>`, followed by the tensors of the call
where they help.
"""

from __future__ import annotations


class TilefoldError(Exception):
    """Base class of every error that this library raises on purpose."""


class ArgumentError(TilefoldError, ValueError):
    """An argument has a value that cannot be honoured."""


class ShapeError(ArgumentError):
    """Sizes do not fit together."""


class DtypeError(ArgumentError):
    """Dtypes do not fit together, or one is not supported."""


class DeviceError(ArgumentError):
    """Tensors of one call lie on different devices."""


class MaskError(ArgumentError):
    """A mask does not fit the call in which it is used."""


class CapacityError(ArgumentError):
    """A schedule needs more fast memory than the machine on which it is played through has, or sequences more
    pages than their cache has.
    """


class ArgumentTypeError(TilefoldError, TypeError):
    """An argument is the wrong kind of object."""


class BackendError(TilefoldError, ValueError):
    """A backend that was asked for by name cannot run this call; `reasons` holds every reason."""

    def __init__(self, message: str, reasons: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.reasons = reasons


class DerivativeError(TilefoldError, NotImplementedError):
    """A derivative was asked for that this library does not provide."""
