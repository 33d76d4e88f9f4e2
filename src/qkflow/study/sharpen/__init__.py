"""Does faster query-key learning sharpen attention on a task? Arms that differ in r, paired runs, metrics that show it."""
