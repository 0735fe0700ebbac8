"""The file of spent privacy: what a run may have released is on the disk before it is released."""

from ghostclip.ledger.ledger import BLOCK, Account, Ledger
from ghostclip.ledger.records import Charge, Head

__all__ = ["BLOCK", "Account", "Charge", "Head", "Ledger"]
