// Text for the clipboard.

/** Whether it is there now. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelected(text);
  }
}

/** Browsers have no other way for pages that come unencrypted from another machine. */
function copySelected(text) {
  const area = document.createElement("textarea");
  area.className = "unseen";
  area.value = text;
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return isCopied;
}
