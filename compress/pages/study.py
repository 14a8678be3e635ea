def page(found):
    return "<html></html>"
