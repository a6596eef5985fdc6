"""The dialog that asks before anything is forgotten."""

from playwright.sync_api import Page, expect


def clear(page: Page, *what: str) -> None:
    """Clear this and nothing else, by the names that the dialog has for it."""
    page.get_by_role("button", name="Clear the cache").click()
    dialog = page.get_by_role("dialog", name="Clear the cache")
    for choice in dialog.get_by_role("checkbox").all():
        label = choice.evaluate("choice => choice.nextSibling.firstChild.textContent")
        choice.set_checked(label in what)
    for label in what:
        expect(dialog.get_by_role("checkbox", name=label)).to_be_checked()
    dialog.get_by_role("button", name="Clear", exact=True).click()
    expect(dialog).to_be_hidden()
