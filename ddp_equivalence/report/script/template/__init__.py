"""The parts of a script that are the same for every user: start, training, comparison, table.

They are ordinary modules, so that they are linted and typed. The slicer takes out of them what a
script needs, without annotations, as it does with the user's file.
"""
