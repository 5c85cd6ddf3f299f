"""A case says what is trained, and how its batch is split over ranks.

Every process builds the same model and batch from its copy of the case.
"""
