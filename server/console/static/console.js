// What all pages share: requests that change something, notices, and times in the reader's zone.

export const formToken = document.querySelector("meta[name=form-token]")?.content ?? "";

/** Sends a request with the page's form token; returns the response. Throws an Error with the server's reason. */
export async function send(method, url, body) {
  const headers = { "X-Form-Token": formToken };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(url, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  if (!answer.ok) throw new Error(await reasonOf(answer));
  return answer;
}

async function reasonOf(answer) {
  try {
    const content = await answer.json();
    return content.detail ?? content.error?.message ?? answer.statusText;
  } catch {
    return `${answer.status} ${answer.statusText}`;
  }
}

/** Shows a message for some seconds; an error stays longer. */
export function notify(words, isBad = false) {
  const notice = document.createElement("div");
  notice.className = isBad ? "notice bad" : "notice";
  notice.textContent = words;
  document.getElementById("notices").append(notice);
  setTimeout(() => notice.remove(), isBad ? 15000 : 5000);
}

function showLocalTimes() {
  const format = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
  for (const time of document.querySelectorAll("time[datetime]")) {
    time.title ||= time.textContent;
    time.textContent = format.format(new Date(time.dateTime));
  }
}

/** Names each cell by its column: on narrow screens the cells of a row stand below each other. */
function nameCells() {
  for (const table of document.querySelectorAll(".table table")) {
    const names = [...table.querySelectorAll("thead th")].map((one) => one.textContent.trim());
    for (const row of table.tBodies[0].rows) {
      [...row.cells].forEach((cell, number) => {
        cell.dataset.name = names[number];
        cell.classList.toggle("nothing", !cell.textContent.trim() && !cell.querySelector("input, button"));
      });
    }
  }
}

document.querySelector("[data-sign-out]")?.addEventListener("click", async () => {
  try {
    await send("POST", "/console/sign-out");
    location.assign("/console/sign-in");
  } catch (error) {
    notify(error.message, true);
  }
});

function prepare() {
  showLocalTimes();
  nameCells();
}

prepare();
document.addEventListener("trainhouse-content", prepare);

/** Asks before something happens that cannot be undone. Resolves to true if the answer is yes. */
export function confirmed(words, yes = "Yes") {
  const dialog = document.getElementById("confirm");
  document.getElementById("confirm-words").textContent = words;
  document.getElementById("confirm-yes").textContent = yes;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

/** Sends what an element's data-method and data-url name, after data-confirm; then goes to data-next, or reloads. */
async function act(element, body) {
  const { method, url, confirm, yes, done, next } = element.dataset;
  if (confirm && !(await confirmed(confirm, yes))) return;
  const button = element.tagName === "FORM" ? element.querySelector("button") : element;
  button.disabled = true;
  try {
    await send(method, url, body);
    if (done) sessionStorage.setItem("trainhouse-notice", done);
    if (next) location.assign(next);
    else location.reload();
  } catch (error) {
    button.disabled = false;
    notify(error.message, true);
  }
}

for (const button of document.querySelectorAll("button[data-method]")) {
  button.addEventListener("click", () => act(button, button.dataset.body && JSON.parse(button.dataset.body)));
}
for (const form of document.querySelectorAll("form[data-method]")) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    act(form, Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, JSON.parse(value)])));
  });
}

const kept = sessionStorage.getItem("trainhouse-notice");
if (kept) {
  sessionStorage.removeItem("trainhouse-notice");
  notify(kept);
}
