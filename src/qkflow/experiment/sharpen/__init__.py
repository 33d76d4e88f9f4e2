"""Does faster query-key learning sharpen attention on a task? Arms that differ in r, in paired runs."""
