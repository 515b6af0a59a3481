//! `ssi-hv top`.
//!
//! One thread queries the VM, which may take as long as a client waits; this one draws and reads
//! keys, so it can end at once.

use std::io::{self, IsTerminal};
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, unbounded};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use ssi_hv::config::name::called;
use ssi_hv::control_socket::client::{ClientError, ask};
use ssi_hv::control_socket::directory::{Entry, Kind};
use ssi_hv::exit::ExitCode;
use ssi_hv::logging::may_colour;
use ssi_hv::readable::{hung_up, is_hung_up};
use ssi_hv::status::VmStatus;
use ssi_hv::top::{Choice, Key, Seen, View, screen};

use super::Failure;
use super::status::{is_end, named, running};
use crate::cli::top::TopConfig;

/// Longest delay of a key or a signal.
const KEY_PAUSE: Duration = Duration::from_millis(50);
/// Interval at which running VMs are listed, and at which the heat map is requested while it is not
/// displayed.
const SELDOM: Duration = Duration::from_secs(5);
/// Limit of answers that are not displayed yet: there is one.
const LOOKS_WAITING_MAX: usize = 4;

/// A request to the querying thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wanted {
    pid: Option<u32>,
    heat: bool,
}

impl Wanted {
    /// What a view shows.
    const fn by(view: &View) -> Self {
        Self {
            pid: view.chosen(),
            heat: view.shows_heat(),
        }
    }
}

/// Its answer.
enum Update {
    Running(Vec<Choice>),
    Seen(u32, Seen),
}

/// Displays a VM until the user quits.
pub fn top(config: &TopConfig) -> Result<ExitCode, Failure> {
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        let text = "top needs a terminal for its picture and its keys; `ssi-hv status` prints the \
                    numbers once";
        return Err(Failure::new(ExitCode::Usage, anyhow!(text)));
    }
    let entries = entries(config)?;
    let signal = Arc::new(AtomicUsize::new(0));
    for number in [SIGTERM, SIGHUP, SIGINT] {
        let value = usize::try_from(number).context("a signal")?;
        signal_hook::flag::register_usize(number, Arc::clone(&signal), value)
            .context("cannot watch for signals")?;
    }
    end_with_terminal()?;
    let view = View::new(choices(&entries), may_colour(&io::stdout()));
    let (wanted, of_wanted) = unbounded();
    let (sender, updates) = bounded(LOOKS_WAITING_MAX);
    let asker = Asker {
        entries,
        follow: config.vm.is_none(),
        interval: config.interval,
        wanted: Wanted::by(&view),
    };
    // Never joined: it may be waiting for a VM.
    std::thread::Builder::new()
        .name("ask".into())
        .spawn(move || asker.run(&of_wanted, &sender))
        .context("cannot start a thread")?;
    // From here on a panic restores the terminal too, through the hook that this sets. Never
    // dropped: on a closed terminal the drop would fail to print an error, and panic.
    let mut terminal = ManuallyDrop::new(ratatui::try_init().context("cannot use the terminal")?);
    let result = show(&mut terminal, view, &wanted, &updates, &signal);
    let shown = terminal.show_cursor();
    let restored = ratatui::try_restore().and(shown);
    if is_hung_up(io::stdin()).unwrap_or(false) {
        return Ok(ExitCode::Terminated);
    }
    let code = result?;
    restored.context("cannot restore the terminal; `reset` does")?;
    Ok(code)
}

/// Ends this process when its terminal is closed. Not every process gets a signal for that, and a
/// reader of keys would read the end of the file forever. Nothing needs to be restored then.
fn end_with_terminal() -> Result<(), Failure> {
    std::thread::Builder::new()
        .name("terminal".into())
        .spawn(|| {
            if hung_up(io::stdin()).is_ok() {
                std::process::exit(ExitCode::Terminated.code().into());
            }
        })
        .context("cannot start a thread")?;
    Ok(())
}

/// Returns the sockets of the selected VMs.
fn entries(config: &TopConfig) -> Result<Vec<Entry>, Failure> {
    let running = running()?;
    if let Some(wanted) = &config.vm {
        let entry = named(&running, wanted)?;
        if entry.kind == Kind::Node {
            return Err(anyhow!("`{wanted}` is a node; `ssi-hv status {wanted}` shows it").into());
        }
        return Ok(vec![entry.clone()]);
    }
    let vms = vms(running);
    if vms.is_empty() {
        return Err(anyhow!("no VM of this user runs here; `ssi-hv run` starts one").into());
    }
    Ok(vms)
}

fn vms(running: Vec<Entry>) -> Vec<Entry> {
    let vms = running.into_iter().filter(|entry| entry.kind == Kind::Vm);
    vms.collect()
}

fn choices(entries: &[Entry]) -> Vec<Choice> {
    let choices = entries.iter().map(|entry| Choice {
        pid: entry.pid,
        name: called(entry.name.as_ref(), entry.pid),
    });
    choices.collect()
}

/// Draws and processes keys until the end. Returns the exit code.
fn show(
    terminal: &mut DefaultTerminal,
    mut view: View,
    wanted: &Sender<Wanted>,
    updates: &Receiver<Update>,
    signal: &AtomicUsize,
) -> Result<ExitCode, Failure> {
    let mut changed = true;
    let mut asked = Wanted::by(&view);
    loop {
        // Relaxed: no other data is published by it.
        match i32::try_from(signal.load(Ordering::Relaxed)) {
            Ok(0) => {}
            Ok(SIGINT) => return Ok(ExitCode::Interrupted),
            _ => return Ok(ExitCode::Terminated),
        }
        for update in updates.try_iter() {
            match update {
                Update::Running(now) => view.list(now),
                Update::Seen(pid, seen) => view.see(pid, seen),
            }
            changed = true;
        }
        if changed {
            let drawn = terminal.draw(|frame| screen::draw(&view, frame));
            drawn.context("cannot draw")?;
            changed = false;
        }
        if !event::poll(KEY_PAUSE).context("cannot read keys")? {
            continue;
        }
        changed = true;
        let Event::Key(pressed) = event::read().context("cannot read keys")? else {
            continue;
        };
        let Some(key) = key(pressed) else { continue };
        if !view.press(key) {
            return Ok(ExitCode::Success);
        }
        let now = Wanted::by(&view);
        // Other keys query nothing, which would make rates those of parts of intervals.
        if now != asked {
            asked = now;
            // The thread ends with this one.
            let _ = wanted.send(now);
        }
    }
}

fn key(event: KeyEvent) -> Option<Key> {
    if event.kind == KeyEventKind::Release {
        return None;
    }
    let control = event.modifiers.contains(KeyModifiers::CONTROL);
    match event.code {
        KeyCode::Char('c' | 'd') if control => Some(Key::Quit),
        KeyCode::Char('q' | 'Q') | KeyCode::Esc => Some(Key::Quit),
        KeyCode::Tab | KeyCode::Right => Some(Key::Next),
        KeyCode::BackTab | KeyCode::Left => Some(Key::Previous),
        KeyCode::Char('h' | 'H') => Some(Key::Heat),
        KeyCode::Char('p' | 'P') => Some(Key::Hold),
        KeyCode::Up => Some(Key::Up),
        KeyCode::Down => Some(Key::Down),
        _ => None,
    }
}

/// The thread that queries VMs.
struct Asker {
    entries: Vec<Entry>,
    /// Whether VMs that start later can be selected too.
    follow: bool,
    interval: Duration,
    wanted: Wanted,
}

impl Asker {
    /// Runs until the receiver is dropped.
    fn run(mut self, wanted: &Receiver<Wanted>, sender: &Sender<Update>) {
        let (mut listed, mut mapped) = (Instant::now(), None::<Instant>);
        loop {
            let begun = Instant::now();
            if self.follow && listed.elapsed() >= SELDOM {
                listed = begun;
                if let Ok(running) = running() {
                    self.entries = vms(running);
                    if sender
                        .send(Update::Running(choices(&self.entries)))
                        .is_err()
                    {
                        return;
                    }
                }
            }
            if let Some(pid) = self.wanted.pid {
                let heat = self.wanted.heat || mapped.is_none_or(|then| then.elapsed() >= SELDOM);
                if heat {
                    mapped = Some(begun);
                }
                if sender
                    .send(Update::Seen(pid, self.look(pid, heat)))
                    .is_err()
                {
                    return;
                }
            }
            let rest = self.interval.saturating_sub(begun.elapsed());
            match wanted.recv_timeout(rest) {
                Ok(first) => {
                    let newest = wanted.try_iter().last().unwrap_or(first);
                    if newest.pid != self.wanted.pid {
                        mapped = None;
                    }
                    self.wanted = newest;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn look(&self, pid: u32, heat: bool) -> Seen {
        let Some(entry) = self.entries.iter().find(|entry| entry.pid == pid) else {
            return Seen::Ended;
        };
        let asked: Result<VmStatus, ClientError> = ask(&entry.path, "/v1/status");
        match asked {
            Ok(status) => {
                let map = heat.then(|| ask(&entry.path, "/v1/heat").ok()).flatten();
                Seen::Status(Box::new(status), map)
            }
            Err(ClientError::Stream(error)) if is_end(&error) => Seen::Ended,
            Err(error) => Seen::Silent(format!("process {pid} {:#}", anyhow!(error))),
        }
    }
}
