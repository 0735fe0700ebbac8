"""The only code that reads autograd graphs: which layers took part, and whose rows theirs are."""
