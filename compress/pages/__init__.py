"""Write what was found as pages of HTML: one file each, without anything from a network.

`svg` draws charts, `html` builds the page around them, and `checkpoint` says what the page of a checkpoint shows. A
page follows the light or dark setting of its reader, prints on white, and fits a narrow screen. Every chart has a name
and a description for readers who do not see it, and the numbers behind it stand in a table of the page.
"""
