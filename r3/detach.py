"""detach: the one place where memory that belongs to somebody else is copied.

What `ray.get` returns of an array is no copy: it is a read-only view of the object store's shared memory, and as long as
any view of it lives the store cannot free the object. An array of routes that is kept for a training step so pins its
whole message, the store fills, and Ray spills to disk or stops; and writing to it raises. vLLM met the same with Ray's
channels (`detach_zero_copy_from_model_runner_output`); this is that function for any value.

    batch = detach(ray.get(reference))      # writable, and the store may free the object

Contract: arrays, memoryviews and torch tensors over memory that is not ours to write are copied, each once, however often
it occurs; containers that held one are rebuilt as the same type; everything else is the same object that came, so where
nothing had to be copied `detach(value) is value`. It looks into lists, tuples, named tuples, dicts, dataclasses and
arrays of objects. Importing this imports neither Ray nor torch."""

from __future__ import annotations

import bisect
import copy
import dataclasses
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np

T = TypeVar("T")


def detach(value: T) -> T:
    """The same value in memory of its own.

    Args:
        value: Anything. A numpy array is copied if it is not writable, a memoryview if it is read-only, a torch tensor on
            the CPU if its memory is mapped read-only or from Ray's object store (a tensor itself does not know).

    Returns:
        `value` itself if nothing had to be copied. A copied array is C-contiguous, whatever it was a view of.
    """
    return cast(T, _Detaching().any(value))


class _Detaching:
    """One walk: `memo` keeps an object that occurs twice from being copied twice."""

    def __init__(self) -> None:
        self.memo: dict[int, tuple[Any, Any]] = {}  # id -> (the object, which so keeps its id, its replacement)
        self.foreign: _Foreign | None = None

    def any(self, value: Any) -> Any:
        known = self.memo.get(id(value))
        if known is not None:
            return known[1]
        result = self._of(value)
        self.memo[id(value)] = (value, result)
        return result

    def _of(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, memoryview):
            return _copied(value) if value.readonly else value
        if isinstance(value, dict):
            return self._filled(value, list(value.items()), lambda new, key, item: new.__setitem__(key, item))
        if isinstance(value, list):
            return self._filled(value, list(enumerate(value)), lambda new, key, item: new.__setitem__(key, item))
        if isinstance(value, tuple):
            items = [self.any(item) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return value._make(items) if hasattr(value, "_make") else type(value)(items)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._dataclass(value)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return value.detach().clone().requires_grad_(value.requires_grad) if self._is_foreign(value) else value
        return value

    def _filled(self, value: Any, items: list[tuple[Any, Any]], put: Callable[[Any, Any, Any], None]) -> Any:
        """The same container, or a shallow copy of it with what was copied put in."""
        changed = [(key, new) for key, item in items if (new := self.any(item)) is not item]
        if not changed:
            return value
        result = copy.copy(value)
        for key, new in changed:
            put(result, key, new)
        return result

    def _dataclass(self, value: Any) -> Any:
        """Not by dataclasses.replace, which runs __post_init__ again, nor copy.copy, which fails for frozen ones with slots."""
        fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if hasattr(value, f.name)]
        new = [(name, self.any(item)) for name, item in fields]
        if all(item is old for (_, item), (_, old) in zip(new, fields, strict=True)):
            return value
        result = object.__new__(type(value))
        for name, item in [*vars(value).items(), *new] if hasattr(value, "__dict__") else new:
            object.__setattr__(result, name, item)
        return result

    def _array(self, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        result = value if value.flags.writeable else value.copy()
        if value.dtype != object:
            return result
        changed = [(i, new) for i, item in enumerate(value.flat) if (new := self.any(item)) is not item]
        if changed and result is value:
            result = value.copy()
        for i, new in changed:
            result.flat[i] = new
        return result

    def _is_foreign(self, tensor: Any) -> bool:
        if tensor.device.type != "cpu" or tensor.layout != sys.modules["torch"].strided or tensor.numel() == 0:
            return False
        if self.foreign is None:
            self.foreign = _Foreign()
        return tensor.data_ptr() in self.foreign


class _Foreign:
    """Mappings of this process that are read-only or Ray's (it maps its store writable also where it hands out views that
    are not)."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.stops: list[int] = []
        try:
            with open("/proc/self/maps") as file:
                lines = [line.split(maxsplit=5) for line in file]
        except OSError:  # not Linux: there a tensor is taken as it is
            lines = []
        for fields in lines:
            if "w" not in fields[1] or (len(fields) > 5 and "plasma" in fields[5]):
                start, stop = fields[0].split("-")
                self.starts.append(int(start, 16))
                self.stops.append(int(stop, 16))

    def __contains__(self, address: int) -> bool:
        i = bisect.bisect_right(self.starts, address) - 1
        return i >= 0 and address < self.stops[i]


def _copied(view: memoryview) -> memoryview:
    flat = memoryview(bytearray(view.tobytes()))
    return flat if view.format == "B" and view.ndim == 1 else flat.cast(view.format, view.shape)  # type: ignore[call-overload]
