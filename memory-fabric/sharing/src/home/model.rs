//! Explores one page between its home, the home's frame, its owner on another node, and a depot that
//! completes requests in any order.

use std::collections::HashSet;

use super::*;
use crate::away::{Asked, Defect};

const PAGE: PageIndex = PageIndex::new(0);

/// Contents that the page has one after the other, from 1 on.
const VALUES: u8 = 5;

#[derive(Clone)]
struct World {
    home: HomeStore,
    /// The frame of the page on its home: contents, and whether the home lacks them.
    frame: Option<(u8, bool)>,
    depot: Option<u8>,
    /// Writes on their way, and whether the depot has carried them out.
    writes: Vec<(u8, bool)>,
    /// A read on its way, and what the depot has found.
    read: Option<Option<u8>>,
    /// What was written back last.
    last: u8,
    /// Another node has contents that the home lacks.
    is_elsewhere: bool,
    newest: u8,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Step {
    /// Another node writes the page and writes it back.
    WriteBack,
    /// The home's frame gets what another node has written.
    Enter,
    /// It gets a copy of what another node has written and keeps.
    Share,
    /// It gets a copy of what the home has stored.
    Copy,
    /// It is written.
    Dirty,
    /// What is in the frame is written back.
    Store,
    /// The frame is freed.
    Leave,
    /// Another node gets the only contents of the frame.
    Give,
    /// The page leaves for the depot.
    SendAway,
    /// The depot carries out a write, and confirms it.
    Apply(usize),
    Confirm(usize),
    /// A node reads the page at its home.
    Read,
    /// The depot looks the page up, and answers.
    LookUp,
    Answer,
}

const STEPS: [Step; 16] = [
    Step::WriteBack,
    Step::Enter,
    Step::Share,
    Step::Copy,
    Step::Dirty,
    Step::Store,
    Step::Leave,
    Step::Give,
    Step::SendAway,
    Step::Apply(0),
    Step::Apply(1),
    Step::Confirm(0),
    Step::Confirm(1),
    Step::Read,
    Step::LookUp,
    Step::Answer,
];

fn page(value: u8) -> Box<PageBytes> {
    Box::new([value; 4096])
}

impl World {
    fn new(defect: Option<Defect>) -> Self {
        let mut home = HomeStore::new(1).with_places(|_| true);
        home.away.defect = defect;
        Self {
            home,
            frame: None,
            depot: None,
            writes: Vec::new(),
            read: None,
            last: 0,
            is_elsewhere: false,
            newest: 0,
        }
    }

    fn kept(&self) -> Option<&Kept> {
        self.home.pages[0].as_ref()
    }

    /// What the home has here, or `None` if the page is away.
    fn here(&self) -> Option<u8> {
        match self.kept().map(|kept| &kept.place) {
            Some(Place::Stored(bytes)) => Some(bytes[0]),
            Some(Place::Frame) => self.frame.map(|(value, _)| value),
            Some(Place::Away) => None,
            Some(Place::Nowhere) | None => panic!("the home has lost the page"),
        }
    }

    /// Whether a correct node may read the page at its home now.
    fn is_readable(&self) -> bool {
        let is_newer = self.frame.is_some_and(|(_, is_newer)| is_newer);
        self.last > 0 && !self.is_elsewhere && !is_newer
    }

    fn next_value(&mut self) -> Option<u8> {
        self.newest += 1;
        (self.newest <= VALUES).then_some(self.newest)
    }

    fn number(&self) -> Number {
        Number::new(self.newest.into()).expect("a small number")
    }

    /// Takes a step; `None` if it is not possible, an error if a rule of all homes is broken.
    fn take(&self, step: Step) -> Option<Result<Self, String>> {
        let mut next = self.clone();
        match step {
            Step::WriteBack => {
                if self.frame.is_some() {
                    return None;
                }
                let value = next.next_value()?;
                let number = next.number();
                assert!(next.home.write(PAGE, number, Some(page(value))).0);
                (next.last, next.is_elsewhere) = (value, false);
            }
            Step::Enter => {
                if self.frame.is_some() || self.read.is_some() {
                    return None;
                }
                next.frame = Some((next.next_value()?, true));
                next.is_elsewhere = false;
                next.home.enters_frame(PAGE);
            }
            Step::Share => {
                if self.frame.is_some() || self.read.is_some() {
                    return None;
                }
                next.frame = Some((next.next_value()?, false));
                next.is_elsewhere = true;
                next.home.enters_frame(PAGE);
            }
            Step::Copy => {
                if self.frame.is_some() || self.read.is_some() || !self.is_readable() {
                    return None;
                }
                next.frame = Some((self.here()?, false));
                next.home.enters_frame(PAGE);
            }
            Step::Dirty => {
                self.frame?;
                next.frame = Some((next.next_value()?, true));
                next.is_elsewhere = false;
            }
            Step::Store => {
                let (value, _) = self.frame.filter(|(_, is_newer)| *is_newer)?;
                let number = next.number();
                assert!(next.home.write(PAGE, number, None).0);
                (next.frame, next.last) = (Some((value, false)), value);
            }
            Step::Leave => {
                let (value, _) = self.frame.filter(|(_, is_newer)| !is_newer)?;
                next.frame = None;
                if next.home.is_in_frame(PAGE) {
                    next.home.leaves_frame(PAGE, page(value));
                }
            }
            Step::Give => {
                self.frame.filter(|(_, is_newer)| *is_newer)?;
                next.home.forget(PAGE);
                (next.frame, next.is_elsewhere) = (None, true);
            }
            Step::SendAway => {
                if self.writes.len() == 2 {
                    return None;
                }
                let leaving = next.home.next_to_leave();
                if let Some(value) = leaving.map(|(_, bytes)| bytes[0]) {
                    next.home.away.writes_now(PAGE);
                    next.writes.push((value, false));
                }
            }
            Step::Apply(place) => {
                let (value, is_applied) = next.writes.get_mut(place)?;
                if std::mem::replace(is_applied, true) {
                    return None;
                }
                next.depot = Some(*value);
            }
            Step::Confirm(place) => {
                self.writes.get(place).filter(|(_, applied)| *applied)?;
                next.writes.remove(place);
                next.home.left(PAGE);
            }
            Step::Read => {
                if self.read.is_some() || !self.is_readable() {
                    return None;
                }
                match self.here() {
                    Some(value) => return Some(self.is_last(value).map(|()| next)),
                    None => {
                        let node = Member::at(1)?;
                        assert_eq!(next.home.away.ask(PAGE, node), Asked::Comes);
                        assert_eq!(next.home.away.ask(PAGE, node), Asked::TooMuch);
                        next.home.away.reads_now(PAGE);
                        next.read = Some(None);
                    }
                }
            }
            Step::LookUp => {
                self.read.filter(Option::is_none)?;
                next.read = Some(Some(self.depot?));
            }
            Step::Answer => {
                let found = self.read??;
                next.read = None;
                assert_eq!(next.home.away.came(PAGE).map(|nodes| nodes.len()), Some(1));
                if self.is_readable() {
                    let value = self.here().unwrap_or(found);
                    return Some(self.is_last(value).map(|()| next));
                }
            }
        }
        Some(next.is_sound().map(|()| next))
    }

    fn is_last(&self, value: u8) -> Result<(), String> {
        if value == self.last {
            return Ok(());
        }
        Err(format!("{value} was read, {} was written back", self.last))
    }

    /// The count of stored pages is right, and each of them can leave.
    fn is_sound(&self) -> Result<(), String> {
        let kept = self.kept();
        let is_stored = kept.is_some_and(|kept| matches!(kept.place, Place::Stored(_)));
        if self.home.stored() != usize::from(is_stored) {
            return Err(format!("{} pages are stored", self.home.stored()));
        }
        let leaves = kept.is_some_and(|kept| kept.leaves) && !self.writes.is_empty();
        let is_queued = self.home.flags[0] & QUEUED != 0;
        if is_queued != (self.home.away.queued() == 1) {
            return Err("the queue and its flag differ".to_owned());
        }
        if is_stored && !leaves && !is_queued {
            return Err("a stored page never leaves".to_owned());
        }
        Ok(())
    }

    fn key(&self) -> String {
        let place = self.kept().map(|kept| match &kept.place {
            Place::Stored(bytes) => (0, bytes[0], kept.leaves),
            Place::Frame => (1, 0, kept.leaves),
            Place::Nowhere => (2, 0, kept.leaves),
            Place::Away => (3, 0, kept.leaves),
        });
        let (home, away) = (&self.home, &self.home.away);
        format!(
            "{place:?} {:?} {away:?} {:?} {:?} {:?} {:?} {} {} {}",
            home.flags,
            self.frame,
            self.depot,
            self.writes,
            self.read,
            self.last,
            self.is_elsewhere,
            self.newest
        )
    }
}

/// Explores all states; returns how many there are, or what is wrong in one of them.
fn explore(defect: Option<Defect>) -> Result<usize, String> {
    let start = World::new(defect);
    let mut seen = HashSet::from([start.key()]);
    let mut open = vec![start];
    while let Some(world) = open.pop() {
        for step in STEPS {
            let Some(next) = world.take(step) else {
                continue;
            };
            let next = next.map_err(|error| format!("{error}, after {step:?}"))?;
            if seen.insert(next.key()) {
                open.push(next);
            }
        }
    }
    Ok(seen.len())
}

#[test]
fn a_read_returns_what_was_written_back_last() {
    let states = explore(None).expect("no wrong state");
    println!("{states} states");
    assert!(states > 1000, "{states} states");
}

#[test]
fn each_rule_is_needed() {
    for defect in [
        Defect::TwoWrites,
        Defect::WriteWhileRead,
        Defect::AnyWrite,
        Defect::KeepLeaving,
        Defect::ForgetBusy,
    ] {
        let found = explore(Some(defect));
        println!("{defect:?}: {found:?}");
        assert!(found.is_err(), "{defect:?} is not found: {found:?} states");
    }
}
