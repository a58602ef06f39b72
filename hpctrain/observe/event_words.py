"""Events in words, for people who watch a run."""

from __future__ import annotations

from typing import Any


def describe_step(event: dict[str, Any], left_s: float | None = None) -> str:
    """A `step` event in words: step, epoch, loss, samples per second, and the time left where it is known."""
    total = event.get("steps_total")
    parts = [f"step {event.get('step', '?')}" + (f"/{total}" if total else "")]
    for key, form in (("epoch", "epoch {}"), ("loss", "loss {:.4g}"), ("samples_per_s", "{:.4g} samples/s")):
        value = event.get(key)
        if value is not None:
            parts.append(form.format(value) if isinstance(value, int | float) else f"{key} {value}")
    if left_s is not None:
        parts.append(f"{_clock(left_s)} left")
    return ", ".join(parts)


def describe_event(event: dict[str, Any]) -> str:
    """Any other event as one line: its message, else its fields."""
    kind = str(event["kind"]).replace("_", " ")
    if "message" in event:
        return f"{kind}: {event['message']}"
    fields = {key: value for key, value in event.items() if key not in ("t", "kind", "metrics")}
    fields |= event.get("metrics") or {}
    return f"{kind}: " + ", ".join(f"{key} {_short(value)}" for key, value in fields.items())


def left_s(first: dict[str, Any], latest: dict[str, Any]) -> float | None:
    """Seconds left, by the mean pace of this attempt (its start-up is not part of it)."""
    try:
        pace_s = (latest["t"] - first["t"]) / (latest["step"] - first["step"])
        return float(pace_s * (latest["steps_total"] - latest["step"]))
    except (KeyError, TypeError, ZeroDivisionError):
        return None


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
