//! A world: each node has one vCPU with a program. Ordinary pages have one copy, which moves by way of
//! their home.

use std::collections::{BTreeMap, VecDeque};

use fabric_pages::page::PageIndex;

use crate::members::Member;
use crate::merge::{Join, Memory, Merge, MergeAction, MergeMessage, Values};
use crate::mutation::Mutation;

/// Entries of a table.
pub(super) const W: usize = 2;

/// The table that links [`BELOW`] by its entry 0.
pub(super) const ABOVE: PageIndex = PageIndex::new(4);
/// The table that is freed.
pub(super) const BELOW: PageIndex = PageIndex::new(5);
/// What the link is.
pub(super) const LINK: u64 = 5 << 12 | 1;

/// An instruction of a vCPU.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Op {
    Store(PageIndex, usize, u64),
    /// A locked increment of entry 1.
    Increment(PageIndex),
    /// Goes on if the entry has the value, and ends the program if not.
    If(PageIndex, usize, u64),
    /// Fails if the entry has another value.
    Expect(PageIndex, usize, u64),
    /// Interrupts another node.
    Signal(usize),
    /// Waits for an interrupt.
    Wait,
}

/// A message that is not about merged tables.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) enum Other {
    Interrupt,
    Get(PageIndex),
    /// The page is to be sent to a node.
    Fetch(PageIndex, usize),
    Data(PageIndex, [u64; W]),
}

/// A message about merged tables, and the values beside it.
type Merged = (MergeMessage, Option<Values<W>>);

type Frames = BTreeMap<PageIndex, [u64; W]>;

struct View<'a>(&'a mut Frames);

impl Memory for View<'_> {
    fn load(&self, page: PageIndex, entry: usize) -> u64 {
        self.0[&page][entry]
    }

    fn replace(&mut self, page: PageIndex, entry: usize, old: u64, new: u64) {
        let place = &mut self.0.get_mut(&page).expect("the page is here")[entry];
        if *place == old {
            *place = new;
        }
    }
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct Node {
    pub(super) merge: Merge<W>,
    pub(super) frames: Frames,
    pub(super) program: VecDeque<Op>,
    interrupts: usize,
    asked: Option<PageIndex>,
    /// The vCPU waits until tables are settled.
    is_fenced: bool,
    held: VecDeque<(usize, Other)>,
    deferred: Vec<(usize, PageIndex)>,
    /// Fetches that came before the page.
    early: Vec<(PageIndex, usize)>,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct World {
    pub(super) nodes: Vec<Node>,
    merges: BTreeMap<(usize, usize), VecDeque<Merged>>,
    others: BTreeMap<(usize, usize), VecDeque<Other>>,
    /// Home and owner of each page, as the home knows it.
    pages: BTreeMap<PageIndex, (usize, usize)>,
    mutation: Option<Mutation>,
    pub(super) failure: Option<String>,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Step {
    Run(usize),
    Merge(usize, usize),
    Other(usize, usize),
}

fn member(place: usize) -> Member {
    Member::at(u8::try_from(place).expect("small")).expect("small")
}

impl World {
    /// [`ABOVE`] is merged at its home and linked to [`BELOW`], which its home alone has.
    pub(super) fn new(homes: [usize; 2], programs: &[&[Op]], mutation: Option<Mutation>) -> Self {
        let node = |(place, program): (usize, &&[Op])| {
            let mut merge = Merge::new(member(place), 4);
            merge.switch = mutation;
            Node {
                merge,
                frames: Frames::new(),
                program: program.iter().copied().collect(),
                interrupts: 0,
                asked: None,
                is_fenced: false,
                held: VecDeque::new(),
                deferred: Vec::new(),
                early: Vec::new(),
            }
        };
        let mut nodes: Vec<Node> = programs.iter().enumerate().map(node).collect();
        let [above, below] = homes;
        nodes[above].frames.insert(ABOVE, [LINK, 0]);
        nodes[below].frames.insert(BELOW, [0, 0]);
        let Node { merge, frames, .. } = &mut nodes[above];
        assert!(merge.start(ABOVE, 2, None, &View(frames)));
        Self {
            nodes,
            merges: BTreeMap::new(),
            others: BTreeMap::new(),
            pages: BTreeMap::from([(ABOVE, (above, above)), (BELOW, (below, below))]),
            mutation,
            failure: None,
        }
    }

    /// Gives nodes copies before the programs start.
    pub(super) fn joined(mut self, page: PageIndex, nodes: &[usize]) -> Self {
        for node in nodes {
            self.ask(*node, page);
            while let Some(step) = self
                .steps()
                .into_iter()
                .find(|step| !matches!(step, Step::Run(_)))
            {
                self.take(step);
            }
        }
        self
    }

    pub(super) fn steps(&self) -> Vec<Step> {
        let can_run = |place: &usize| {
            let node = &self.nodes[*place];
            let waits = node.program.front() == Some(&Op::Wait) && node.interrupts == 0;
            let is_stopped = node.is_fenced && !node.merge.is_settled();
            !node.program.is_empty() && node.asked.is_none() && !waits && !is_stopped
        };
        let run = (0..self.nodes.len()).filter(can_run).map(Step::Run);
        let merges = self.merges.keys().map(|(from, to)| Step::Merge(*from, *to));
        let others = self.others.keys().map(|(from, to)| Step::Other(*from, *to));
        run.chain(merges).chain(others).collect()
    }

    pub(super) fn take(&mut self, step: Step) {
        match step {
            Step::Run(node) => self.run(node),
            Step::Merge(from, to) => {
                let queue = self.merges.get_mut(&(from, to)).expect("a message");
                let (message, values) = queue.pop_front().expect("a message");
                if queue.is_empty() {
                    self.merges.remove(&(from, to));
                }
                let mut actions = Vec::new();
                let Node { merge, frames, .. } = &mut self.nodes[to];
                let handled = merge.handle(
                    member(from),
                    message,
                    values,
                    &mut View(frames),
                    &mut actions,
                );
                if let Err(offence) = handled {
                    self.failure = Some(format!("{offence} at {to}: {message:?}"));
                }
                self.carry_out(to, actions);
                for (from, page) in std::mem::take(&mut self.nodes[to].deferred) {
                    self.serve(to, from, page);
                }
                self.release(to);
            }
            Step::Other(from, to) => {
                let queue = self.others.get_mut(&(from, to)).expect("a message");
                let message = queue.pop_front().expect("a message");
                if queue.is_empty() {
                    self.others.remove(&(from, to));
                }
                self.handle(from, to, message);
            }
        }
    }

    fn carry_out(&mut self, at: usize, actions: Vec<MergeAction<W>>) {
        let mut actions = VecDeque::from(actions);
        while let Some(action) = actions.pop_front() {
            match action {
                MergeAction::Send {
                    to,
                    message,
                    values,
                } => {
                    let queue = self.merges.entry((at, to.index())).or_default();
                    queue.push_back((message, values));
                }
                MergeAction::Install { page, values } => {
                    let node = &mut self.nodes[at];
                    if node.asked != Some(page) || node.frames.insert(page, *values).is_some() {
                        self.failure = Some(format!("{page} comes unasked at {at}"));
                    }
                    self.nodes[at].asked = None;
                }
                // No vCPU can use the page until it asks for it again.
                MergeAction::Zap(page) => {
                    let mut more = Vec::new();
                    let Node { merge, frames, .. } = &mut self.nodes[at];
                    merge.zapped(page, &View(frames), &mut more);
                    merge.proceed(&mut View(frames), &mut more);
                    actions.extend(more);
                }
                MergeAction::Free(page) => {
                    self.nodes[at].frames.remove(&page);
                }
            }
        }
    }

    fn fence(&mut self, at: usize) {
        if self.mutation == Some(Mutation::NoFenceOfTables) {
            return;
        }
        let mut actions = Vec::new();
        let Node { merge, frames, .. } = &mut self.nodes[at];
        merge.fence(&View(frames), &mut actions);
        merge.proceed(&mut View(frames), &mut actions);
        self.carry_out(at, actions);
    }

    /// Sends a message that shows what the node has stored.
    fn send(&mut self, from: usize, to: usize, message: Other) {
        self.fence(from);
        self.nodes[from].held.push_back((to, message));
        self.release(from);
    }

    fn release(&mut self, at: usize) {
        while self.nodes[at].merge.is_settled() {
            let Some((to, message)) = self.nodes[at].held.pop_front() else {
                return;
            };
            self.others.entry((at, to)).or_default().push_back(message);
        }
    }

    fn run(&mut self, at: usize) {
        let op = *self.nodes[at].program.front().expect("an instruction");
        match op {
            Op::Signal(to) => {
                if !self.nodes[at].is_fenced {
                    self.nodes[at].is_fenced = true;
                    self.fence(at);
                    return;
                }
                self.nodes[at].is_fenced = false;
                let queue = self.others.entry((at, to)).or_default();
                queue.push_back(Other::Interrupt);
            }
            Op::Wait => self.nodes[at].interrupts -= 1,
            Op::Store(page, ..) | Op::Increment(page) | Op::If(page, ..) | Op::Expect(page, ..) => {
                let node = &mut self.nodes[at];
                let Some(frame) = node.frames.get_mut(&page) else {
                    self.ask(at, page);
                    return;
                };
                match op {
                    Op::Store(_, entry, value) => frame[entry] = value,
                    Op::Increment(_) => frame[1] += 1,
                    Op::If(_, entry, value) if frame[entry] != value => {
                        node.program.truncate(1);
                    }
                    Op::Expect(_, entry, value) if frame[entry] != value => {
                        let found = frame[entry];
                        self.failure = Some(format!("node {at} reads {found} of {page}"));
                    }
                    _ => {}
                }
            }
        }
        self.nodes[at].program.pop_front();
    }

    fn ask(&mut self, at: usize, page: PageIndex) {
        let (home, _) = self.pages[&page];
        self.nodes[at].asked = Some(page);
        if home == at {
            self.serve(at, at, page);
        } else {
            // A request shows nothing.
            let queue = self.others.entry((at, home)).or_default();
            queue.push_back(Other::Get(page));
        }
    }

    /// The home of a page serves a request for it.
    fn serve(&mut self, home: usize, from: usize, page: PageIndex) {
        let (_, owner) = self.pages[&page];
        let mut actions = Vec::new();
        let Node { merge, frames, .. } = &mut self.nodes[home];
        if from != home {
            let mut join = merge.join(member(from), page, &mut actions);
            if join == Ok(Join::Ordinary)
                && owner == home
                && frames.contains_key(&page)
                && let Some((level, parent, entry)) = merge.linked(page, &View(frames))
            {
                assert!(merge.start(page, level, Some((parent, entry)), &View(frames)));
                join = merge.join(member(from), page, &mut actions);
            }
            match join {
                Ok(Join::Ordinary) => {}
                Ok(Join::Joined) => return self.carry_out(home, actions),
                Ok(Join::Later) => return self.nodes[home].deferred.push((from, page)),
                Err(offence) => self.failure = Some(offence.to_string()),
            }
        }
        self.pages.insert(page, (home, from));
        if owner == home {
            self.fetch(home, page, from);
        } else {
            let queue = self.others.entry((home, owner)).or_default();
            queue.push_back(Other::Fetch(page, from));
        }
    }

    fn fetch(&mut self, at: usize, page: PageIndex, to: usize) {
        let node = &mut self.nodes[at];
        // A page that has just come is used once before it leaves.
        let Some(frame) = node.frames.remove(&page) else {
            node.early.push((page, to));
            return;
        };
        if node.merge.has(page) {
            self.failure = Some(format!("{page} is merged and sent as ordinary memory"));
        }
        self.send(at, to, Other::Data(page, frame));
    }

    fn handle(&mut self, from: usize, to: usize, message: Other) {
        match message {
            Other::Interrupt => self.nodes[to].interrupts += 1,
            Other::Get(page) => self.serve(to, from, page),
            Other::Fetch(page, requester) => self.fetch(to, page, requester),
            Other::Data(page, bytes) => {
                let node = &mut self.nodes[to];
                node.frames.insert(page, bytes);
                node.asked = None;
                // It is held until the vCPU has used it.
                self.run(to);
                let early = &mut self.nodes[to].early;
                if let Some(place) = early.iter().position(|(one, _)| *one == page) {
                    let (page, requester) = early.swap_remove(place);
                    self.fetch(to, page, requester);
                }
            }
        }
    }

    /// What has to hold where nothing can happen any more. [`BELOW`] has been `freed` with these bytes.
    pub(super) fn check_end(&self, freed: Option<[u64; W]>) -> Result<(), String> {
        let is_stuck = |node: &&Node| !node.program.is_empty() && node.program[0] != Op::Wait;
        if self
            .nodes
            .iter()
            .any(|node| is_stuck(&node) || !node.held.is_empty())
        {
            return Err("a node waits for ever".to_owned());
        }
        if self.nodes.iter().any(|node| !node.merge.is_settled()) {
            return Err("tables are never settled".to_owned());
        }
        let copies = |page| {
            self.nodes
                .iter()
                .filter_map(move |node| node.frames.get(&page))
        };
        for page in [ABOVE, BELOW] {
            let mut all = copies(page);
            let first = all.next().ok_or(format!("{page} is lost"))?;
            if all.any(|copy| copy != first) {
                return Err(format!("copies of {page} differ"));
            }
        }
        if let Some(freed) = freed {
            let all: Vec<_> = copies(BELOW).collect();
            if all != [&freed] {
                return Err(format!("{BELOW} is {all:?} in the end"));
            }
        }
        Ok(())
    }
}
