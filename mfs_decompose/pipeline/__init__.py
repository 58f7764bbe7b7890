"""What the commands do, from end to end: decompose, restore, inspect."""
