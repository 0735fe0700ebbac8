"""The laws that don't hold yet: ids of tests, as "module::test[case]". The list only gets shorter."""

KNOWN: set[str] = set()
