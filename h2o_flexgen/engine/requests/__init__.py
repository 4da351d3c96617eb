"""From what a user passes to sequences: token ids, checks, templates, the queue."""
