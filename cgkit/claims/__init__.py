"""What the article says, and what measuring says of it.

``claims.csv`` lists every heading, mechanism and number of the article, each with an id, in our own words. A
notebook that measures one calls :func:`claim`, which shows a card and leaves a record in the cell's output;
``notebooks/claims.py`` makes ``notebooks/CLAIMS.md`` of these records.
"""

from cgkit.claims.card import MIME, OUTCOMES, Claim, Claimed, ClaimError, Claims, claim
from cgkit.claims.listing import of_notebook, read

__all__ = ["MIME", "OUTCOMES", "Claim", "ClaimError", "Claimed", "Claims", "claim", "of_notebook", "read"]
