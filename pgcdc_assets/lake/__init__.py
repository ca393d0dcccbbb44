"""Reads the lake, without the source.

lake   ``Lake``: chooses a point by LSN or time
point  ``LakeAt``: what a reader can do with the mirrors of one point
"""
