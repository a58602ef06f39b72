"""What runs in every rank: the Task, the loop, and how a rank begins and ends."""
