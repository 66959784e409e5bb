"""The audit's part of each paper, in the order in which the ledger lists their statements."""

from __future__ import annotations

from kvbench.papers.forensics.paper_audit import PaperAudit
from kvbench.papers.forensics.qhitter import QHITTER
from kvbench.papers.forensics.refreekv import REFREEKV
from kvbench.papers.forensics.think import THINK
from kvbench.papers.forensics.uncomp import UNCOMP
from kvbench.papers.forensics.vatp import VATP

PAPERS: tuple[PaperAudit, ...] = (THINK, REFREEKV, UNCOMP, VATP, QHITTER)
