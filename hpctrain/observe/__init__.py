"""What a run tells: events (append-only JSON lines) and the progress shown while it runs."""
