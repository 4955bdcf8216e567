"""Which random number decides what: the purpose of noise.

A kind of decision that must be independent of the token draw at the same position takes a purpose of its own; two that
share words correlate.
"""

from __future__ import annotations

TOKEN_PURPOSE = 0  # a token, and under shared noise its draft
ACCEPTANCE_PURPOSE = 2  # the coin of a draft
RESIDUAL_PURPOSE = 3  # the token in place of a rejected draft
# + k: draft k of a pass, where drafts must be independent of tokens. A position is drafted again, from a later anchor,
# when drafts before it were rejected: with a purpose for each k its noise is new then, and what was learned from the
# earlier draft (confidences that choose a budget) says nothing about it.
DRAFT_PURPOSE = 16
