//! A headless browser, controlled by the DevTools protocol
//! (<https://chromedevtools.github.io/devtools-protocol/>) over two pipes.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};

use super::missing;
use crate::cleanup::{self, Process};
use crate::sys;

/// Deadline of one step. The first one starts the browser: 2 s on an idle machine.
const STEP_DEADLINE: Duration = Duration::from_secs(60);
/// Names of Chromium, and of Chrome, which works as well.
const NAMES: [&str; 3] = ["chromium", "chromium-headless-shell", "google-chrome"];

/// A running browser without a network.
#[derive(Debug)]
pub struct Browser {
    _process: Process,
    _profile: tempfile::TempDir,
    requests: File,
    /// Answers and events in order of arrival.
    messages: mpsc::Receiver<Value>,
    last_id: u64,
}

/// An open page, with its activity so far.
#[derive(Debug)]
pub struct Opened {
    session: String,
    /// Every resource that it requested, except the page itself.
    pub requests: Vec<String>,
    /// Errors and warnings on the console.
    pub complaints: Vec<String>,
}

impl Browser {
    /// Returns why no browser can run.
    pub fn missing() -> Option<String> {
        missing("unshare", "util-linux").or_else(|| match name() {
            Some(_) => None,
            None => missing(NAMES[0], NAMES[0]),
        })
    }

    /// Starts the browser; its output goes to `log`.
    pub fn start(log: &Path) -> anyhow::Result<Self> {
        let profile = tempfile::tempdir()?;
        let (their_requests, requests) = pipe()?;
        let (answers, their_answers) = pipe()?;
        let mut command = Command::new("unshare");
        // In a network namespace of its own it can reach no server.
        command
            .args([
                "--map-root-user",
                "--net",
                "--",
                name().context("no browser")?,
            ])
            .args([
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
            ])
            .args([
                "--no-first-run",
                "--hide-scrollbars",
                "--remote-debugging-pipe",
            ])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg("about:blank");
        let log = File::create(log)?;
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        sys::pass_descriptors(&mut command, vec![their_requests, their_answers]);
        let process = Process::spawn(&mut command).context("the browser")?;
        // Dropping the command closes the browser's ends of the pipes here.
        drop(command);
        let (sender, messages) = mpsc::channel();
        // The thread ends with the browser, whose end of the pipe is then closed.
        std::thread::spawn(move || {
            for message in BufReader::new(File::from(answers)).split(0) {
                let value = message
                    .ok()
                    .and_then(|bytes| serde_json::from_slice(&bytes).ok());
                let Some(true) = value.map(|value| sender.send(value).is_ok()) else {
                    break;
                };
            }
        });
        Ok(Self {
            _process: process,
            _profile: profile,
            requests: File::from(requests),
            messages,
            last_id: 0,
        })
    }

    /// Opens a file in a window of this size, optionally as a mobile device, and waits until it is
    /// loaded completely.
    pub fn open(&mut self, file: &Path, size: (u32, u32), mobile: bool) -> anyhow::Result<Opened> {
        let target = self.ask("", "Target.createTarget", &json!({"url": "about:blank"}))?;
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let attached = self.ask("", "Target.attachToTarget", &attach)?;
        let session = attached["sessionId"]
            .as_str()
            .context("no session")?
            .to_owned();
        let mut opened = Opened {
            session,
            requests: Vec::new(),
            complaints: Vec::new(),
        };
        for domain in ["Page", "Network", "Log", "Runtime"] {
            self.page(&mut opened, &format!("{domain}.enable"), &json!({}))?;
        }
        let metrics = json!({
            "width": size.0, "height": size.1, "deviceScaleFactor": 1, "mobile": mobile,
        });
        self.page(&mut opened, "Emulation.setDeviceMetricsOverride", &metrics)?;
        let url = format!("file://{}", file.display());
        let went = self.page(&mut opened, "Page.navigate", &json!({"url": url}))?;
        ensure!(went["errorText"].is_null(), "{url}: {went}");
        let deadline = cleanup::after(STEP_DEADLINE);
        while self.next(deadline, &mut Some(&mut opened))?["method"] != "Page.loadEventFired" {}
        // All requests of a page during loading are known by its next frame.
        let frame = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))";
        self.evaluate(&mut opened, frame)?;
        opened.requests.retain(|request| *request != url);
        Ok(opened)
    }

    /// Evaluates an expression in a page.
    pub fn evaluate(&mut self, opened: &mut Opened, expression: &str) -> anyhow::Result<Value> {
        let parameters =
            json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let answer = self.page(opened, "Runtime.evaluate", &parameters)?;
        ensure!(
            answer["exceptionDetails"].is_null(),
            "{expression}: {answer}"
        );
        Ok(answer["result"]["value"].clone())
    }

    /// Sends a command to a page.
    pub fn page(
        &mut self,
        opened: &mut Opened,
        method: &str,
        parameters: &Value,
    ) -> anyhow::Result<Value> {
        let session = opened.session.clone();
        self.command(&session, method, parameters, Some(opened))
    }

    fn ask(&mut self, session: &str, method: &str, parameters: &Value) -> anyhow::Result<Value> {
        self.command(session, method, parameters, None)
    }

    fn command(
        &mut self,
        session: &str,
        method: &str,
        parameters: &Value,
        mut opened: Option<&mut Opened>,
    ) -> anyhow::Result<Value> {
        self.last_id += 1;
        let mut message = json!({"id": self.last_id, "method": method, "params": parameters});
        if !session.is_empty() {
            message["sessionId"] = session.into();
        }
        let mut bytes = serde_json::to_vec(&message)?;
        bytes.push(0);
        self.requests
            .write_all(&bytes)
            .context("the browser has exited")?;
        let deadline = cleanup::after(STEP_DEADLINE);
        loop {
            let mut answer = self
                .next(deadline, &mut opened)
                .context(method.to_owned())?;
            if answer["id"] != self.last_id {
                continue;
            }
            ensure!(answer["error"].is_null(), "{method}: {}", answer["error"]);
            return Ok(answer["result"].take());
        }
    }

    /// Returns the next message, and records its event if it belongs to a page.
    fn next(
        &mut self,
        deadline: Instant,
        opened: &mut Option<&mut Opened>,
    ) -> anyhow::Result<Value> {
        let left = deadline.saturating_duration_since(Instant::now());
        let message = match self.messages.recv_timeout(left) {
            Ok(message) => message,
            Err(mpsc::RecvTimeoutError::Timeout) => bail!("the browser does not answer in time"),
            Err(mpsc::RecvTimeoutError::Disconnected) => bail!("the browser has ended"),
        };
        if let Some(opened) = opened
            && message["sessionId"] == opened.session.as_str()
        {
            opened.note(&message);
        }
        Ok(message)
    }
}

impl Opened {
    fn note(&mut self, message: &Value) {
        let of = &message["params"];
        match message["method"].as_str().unwrap_or_default() {
            "Network.requestWillBeSent" => {
                let url = of["request"]["url"].as_str().unwrap_or("?");
                // Data URLs are part of the page and are not fetched.
                if !url.starts_with("data:") {
                    self.requests.push(url.to_owned());
                }
            }
            "Runtime.exceptionThrown" => self.complaints.push(of["exceptionDetails"].to_string()),
            "Runtime.consoleAPICalled" if is_bad(&of["type"]) => {
                self.complaints.push(of["args"].to_string());
            }
            "Log.entryAdded" if is_bad(&of["entry"]["level"]) => {
                self.complaints.push(of["entry"]["text"].to_string());
            }
            _ => {}
        }
    }
}

fn is_bad(level: &Value) -> bool {
    matches!(level.as_str(), Some("error" | "warning" | "assert"))
}

fn name() -> Option<&'static str> {
    NAMES.into_iter().find(|name| missing(name, name).is_none())
}

/// Returns the reading and the writing end of a pipe, both close-on-exec.
fn pipe() -> std::io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = std::io::pipe()?;
    // Not 3 or 4, which become the browser's ends.
    let high =
        |fd: &OwnedFd| -> std::io::Result<OwnedFd> { Ok(rustix::io::fcntl_dupfd_cloexec(fd, 10)?) };
    Ok((high(&read.into())?, high(&write.into())?))
}
