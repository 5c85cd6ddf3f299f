"""What every stand-alone script is made of, beside the user's own functions.

Ordinary modules, so that they are linted and typed; the exporter slices out of them what a script
needs, without annotations, as it does with the user's file.
"""
