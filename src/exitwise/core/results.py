"""What results have in common: plain data, pandas on request."""

from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas


def to_jsonable(value: Any) -> Any:
    """Nested plain data that JSON can hold; a number that is none becomes None."""
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value


class Result:
    """For frozen dataclasses of numbers."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; a number that is not finite becomes None."""
        data: dict[str, Any] = to_jsonable(asdict(self))  # type: ignore[call-overload]
        return data

    def to_pandas(self) -> "pandas.DataFrame":
        """A table with one row, or a row for each of its parts; needs pandas."""
        import pandas

        return pandas.DataFrame(self._records())

    def _records(self) -> list[dict[str, Any]]:
        return [{key: value for key, value in self.to_dict().items() if not isinstance(value, dict | list)}]
