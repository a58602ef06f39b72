"""The training state made durable: snapshot, commit protocol, restore."""
