// Keeps the page up to date, as long as someone sees it.

const PERIOD = 5000;
const age = document.getElementById("age");

async function refresh() {
  if (document.hidden) return;
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" }, redirect: "error" });
    if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    document.getElementById("capacity").replaceWith(page.getElementById("capacity"));
    document.dispatchEvent(new Event("trainhouse-content"));
    age.textContent = `as of ${new Date().toLocaleTimeString()}`;
    age.className = "state live";
  } catch (error) {
    age.textContent = `not up to date: ${error.message}`;
    age.className = "state bad";
  }
}

setInterval(refresh, PERIOD);
