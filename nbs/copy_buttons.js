// A button on every block of code that copies it. Quarto has its own; Sphinx's pages load this.
addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("div.highlight > pre")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy-code";
    button.textContent = "copy";
    button.setAttribute("aria-label", "copy this code");
    button.addEventListener("click", async () => {
      const text = block.textContent;
      try { await navigator.clipboard.writeText(text); }
      catch (refused) {
        getSelection().selectAllChildren(block);
        document.execCommand("copy");
      }
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
    block.parentElement.append(button);
  }
  // The theme names its folded blocks "Toggle hidden content"; their visible words say more
  for (const fold of document.querySelectorAll("summary[aria-label]")) fold.removeAttribute("aria-label");
});
