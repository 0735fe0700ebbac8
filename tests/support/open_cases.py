"""The laws that don't hold yet. The list only gets shorter: a case that holds fails the tests until it is taken off."""

# {test: its open cases, by their ids}
_OPEN: dict[str, str] = {}

KNOWN = {f"{test}[{case}]" for test, cases in _OPEN.items() for case in cases.split()}
