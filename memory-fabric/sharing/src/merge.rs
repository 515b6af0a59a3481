//! Merged tables: which pages they are, and what leaves this node only when they are settled.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use fabric_coherence::merge::{
    ENTRIES, Join, Memory, Merge, MergeAction, MergeMessage, Values, tables,
};
use fabric_coherence::{Member, Message, Violation};
use fabric_pages::page::{PAGE_SIZE, PageBytes, PageIndex};
use fabric_peers::{HomeMessage, PeerMessage, Peers};

use crate::engine::Engine;
use crate::fences::TableFences;
use crate::frames::Frames;
use crate::{Config, Failure, TABLES_MAX};

/// A message that waits until merged tables are settled.
struct Held {
    to: Member,
    message: PeerMessage,
    bytes: Option<Box<PageBytes>>,
}

/// The merged tables of this node, and what waits for them.
pub(crate) struct Tables {
    merge: Merge,
    /// Whether this node merges tables of which it is the home.
    is_on: bool,
    held: VecDeque<Held>,
    /// Requests for pages whose merging is changing.
    deferred: Vec<(Member, Message)>,
    fences: Arc<TableFences>,
    /// The last fence that was begun, and the last one that is over.
    begun: u64,
    over: u64,
    /// When a message about tables came last, or they have not been settled since.
    since: Option<Instant>,
}

impl Tables {
    pub(crate) fn new(config: &Config, fences: Arc<TableFences>) -> Self {
        let members = config.members.iter().count().max(1);
        Self {
            merge: Merge::new(config.me, TABLES_MAX / members),
            is_on: config.merge_tables,
            held: VecDeque::new(),
            deferred: Vec::new(),
            fences,
            begun: 0,
            over: 0,
            since: None,
        }
    }

    /// Whether vCPUs of this node can write the page because it is merged.
    pub(crate) fn has(&self, page: PageIndex) -> bool {
        self.merge.has(page)
    }
}

/// The bytes of tables, which vCPUs use at the same time. Relaxed: each entry is complete in itself, and
/// the kernel's calls that map and unmap pages order the rest.
struct View<'a>(&'a Frames);

impl Memory for View<'_> {
    fn load(&self, page: PageIndex, entry: usize) -> u64 {
        self.0.words(page)[entry].load(Ordering::Relaxed)
    }

    fn replace(&mut self, page: PageIndex, entry: usize, old: u64, new: u64) {
        let word = &self.0.words(page)[entry];
        // A vCPU that stored something else was first.
        let _ = word.compare_exchange(old, new, Ordering::Relaxed, Ordering::Relaxed);
    }
}

fn values(bytes: &PageBytes) -> Values {
    let mut values = Box::new([0; ENTRIES]);
    let (words, _) = bytes.as_chunks();
    for (value, word) in values.iter_mut().zip(words) {
        *value = u64::from_ne_bytes(*word);
    }
    values
}

fn fill(bytes: &mut PageBytes, values: &[u64; ENTRIES]) {
    let (words, _) = bytes.as_chunks_mut();
    for (word, value) in words.iter_mut().zip(values) {
        *word = value.to_ne_bytes();
    }
}

/// Whether other nodes can see by a message what this node has stored.
const fn shows_stores(message: &PeerMessage) -> bool {
    match message {
        PeerMessage::Coherence(message) => matches!(
            message,
            Message::Data { .. }
                | Message::Ack { .. }
                | Message::Put { .. }
                | Message::PutShared { .. }
                | Message::SplitState { .. }
        ),
        PeerMessage::Home(message) => {
            matches!(
                message,
                HomeMessage::Write { .. } | HomeMessage::Bytes { .. }
            )
        }
        PeerMessage::Merge(_) => false,
    }
}

impl<P: Peers> Engine<P> {
    /// Whether a message to a peer may be sent now; else it is to be passed to [`Self::hold_back`].
    pub(crate) fn may_leave(&mut self, message: &PeerMessage) -> Result<bool, Failure> {
        if self.tables.merge.is_empty() && self.tables.held.is_empty() {
            return Ok(true);
        }
        if shows_stores(message) {
            self.fence_tables()?;
        }
        Ok(self.tables.held.is_empty() && self.tables.merge.is_settled())
    }

    /// Keeps a message until merged tables are settled, and all others behind it.
    pub(crate) fn hold_back(
        &mut self,
        to: Member,
        message: PeerMessage,
        bytes: Option<Box<PageBytes>>,
    ) {
        self.stats.held_for_tables.increment();
        self.tables.held.push_back(Held { to, message, bytes });
    }

    fn fence_tables(&mut self) -> Result<(), Failure> {
        let mut actions = Vec::new();
        let mut view = View(&self.frames);
        self.tables.merge.fence(&view, &mut actions);
        self.tables.merge.proceed(&mut view, &mut actions);
        self.carry_out_merge(actions)
    }

    /// Sends what waited for merged tables, and ends fences, if tables are settled. Begins fences that
    /// were asked for.
    pub(crate) fn serve_fences(&mut self) -> Result<bool, Failure> {
        let asked = self.tables.fences.asked();
        let mut worked = false;
        if asked != self.tables.begun {
            self.tables.begun = asked;
            self.fence_tables()?;
            worked = true;
        }
        if !self.tables.merge.is_settled() {
            return Ok(worked);
        }
        self.tables.since = None;
        if self.tables.over != self.tables.begun {
            self.tables.over = self.tables.begun;
            self.tables.fences.end(self.tables.over);
            worked = true;
        }
        while let Some(Held { to, message, bytes }) = self.tables.held.pop_front() {
            self.give_way.is_urgent = true;
            self.peers.send(to, message, bytes.as_deref());
            self.spare_pages.extend(bytes);
            worked = true;
        }
        Ok(worked)
    }

    /// Handles a message about merged tables.
    pub(crate) fn merge_message(
        &mut self,
        from: Member,
        message: MergeMessage,
        bytes: Option<Box<PageBytes>>,
    ) -> Result<(), Failure> {
        let page = message.page();
        let is_install = matches!(message, MergeMessage::Copy { .. });
        if is_install && (from != self.home_of(page) || !self.cache.cancel(page)) {
            return Err(Violation::DataNotAsked(page).of(from).into());
        }
        self.tables.since = Some(Instant::now());
        let mut actions = Vec::new();
        let mut view = View(&self.frames);
        let values = bytes.as_deref().map(values);
        self.spare_pages.extend(bytes);
        self.tables
            .merge
            .handle(from, message, values, &mut view, &mut actions)?;
        self.carry_out_merge(actions)?;
        for (from, message) in std::mem::take(&mut self.tables.deferred) {
            self.handle(from, &message)?;
        }
        self.serve_fences()?;
        Ok(())
    }

    fn carry_out_merge(&mut self, actions: Vec<MergeAction>) -> Result<(), Failure> {
        let mut actions = VecDeque::from(actions);
        while let Some(action) = actions.pop_front() {
            match action {
                MergeAction::Send {
                    to,
                    message,
                    values,
                } => {
                    self.tables.since.get_or_insert_with(Instant::now);
                    let mut place = self.spare_page();
                    let bytes = values.map(|values| {
                        fill(&mut place, &values);
                        &*place
                    });
                    if matches!(message, MergeMessage::Change { .. }) {
                        self.stats.table_changes.increment();
                    }
                    self.give_way.is_urgent = true;
                    self.peers.send(to, PeerMessage::Merge(message), bytes);
                    self.spare_pages.push(place);
                }
                MergeAction::Install { page, values } => {
                    self.tables.fences.activate();
                    let mut place = self.spare_page();
                    fill(&mut place, &values);
                    let installed = self.frames.install(page, &place, true);
                    self.spare_pages.push(place);
                    installed?;
                    self.woken(page);
                    self.one_more()?;
                }
                MergeAction::Zap(page) => {
                    self.frames.zap(page)?;
                    let mut more = Vec::new();
                    let mut view = View(&self.frames);
                    self.tables.merge.zapped(page, &view, &mut more);
                    self.tables.merge.proceed(&mut view, &mut more);
                    actions.extend(more);
                }
                MergeAction::Free(page) => self.free(page),
            }
        }
        self.stats.merged_tables.set(self.tables.merge.len() as u64);
        Ok(())
    }

    /// Answers a request of another node for a merged table, or for one that can be. Returns whether
    /// the directory has nothing to do for it.
    pub(crate) fn serve_table(&mut self, from: Member, message: &Message) -> Result<bool, Failure> {
        let Message::Get { page, .. } = *message else {
            return Ok(false);
        };
        if !self.tables.is_on || from == self.config.me {
            return Ok(false);
        }
        let mut actions = Vec::new();
        let mut join = self.tables.merge.join(from, page, &mut actions)?;
        if join == Join::Ordinary && self.begin_merging(page)? {
            join = self.tables.merge.join(from, page, &mut actions)?;
        }
        if join == Join::Later {
            self.tables.deferred.push((from, message.clone()));
        }
        self.carry_out_merge(actions)?;
        Ok(join != Join::Ordinary)
    }

    /// A held page is about to be given up: if it is a table of the kernel, the nodes that wait for it
    /// get copies instead.
    pub(crate) fn merge_instead(&mut self, page: PageIndex) -> Result<(), Failure> {
        if self.tables.is_on
            && self.home_of(page) == self.config.me
            && self.directory.has_waiting(page)
        {
            self.begin_merging(page)?;
        }
        Ok(())
    }

    /// Merges a page that this node alone has, if it is a table of the kernel, and gives copies to
    /// those that wait for it already.
    fn begin_merging(&mut self, page: PageIndex) -> Result<bool, Failure> {
        let is_alone = self.cache.is_modified(page) || self.owned.is_writable(page);
        if !is_alone || !self.frames.is_resident(page) {
            return Ok(false);
        }
        let frames = &self.frames;
        let view = View(frames);
        let (level, parent) = match self.tables.merge.linked(page, &view) {
            Some((level, parent, entry)) => (level, Some((parent, entry))),
            None => {
                let load = |page: PageIndex, entry| {
                    let is_here = frames.is_in_memory(page) && frames.is_resident(page);
                    is_here.then(|| view.load(page, entry))
                };
                if !tables::is_kernel_root(page, load) {
                    return Ok(false);
                }
                (tables::ROOT, None)
            }
        };
        // Before the table is read: a vCPU that stores into it later, and sends an interrupt, waits.
        self.tables.fences.activate();
        if !self.tables.merge.start(page, level, parent, &view) {
            return Ok(false);
        }
        tracing::debug!(%page, level, "a table of the kernel is merged");
        let mut actions = Vec::new();
        for member in self.directory.take_gets(page) {
            self.tables.merge.join(member, page, &mut actions)?;
        }
        self.carry_out_merge(actions)?;
        Ok(true)
    }

    /// When [`Self::check_tables`] is to be called.
    pub(crate) fn tables_overdue_at(&self) -> Option<Instant> {
        let since = self.tables.since?;
        Some(since + self.config.transaction_time_max)
    }

    /// Names who keeps tables from being settled for too long.
    pub(crate) fn check_tables(&mut self, now: Instant) -> Result<(), Failure> {
        if self.tables_overdue_at().is_none_or(|at| now < at) {
            return Ok(());
        }
        match self.tables.merge.missing() {
            Some((page, peer)) => Err(Violation::Silent(page).of(peer).into()),
            None => {
                self.tables.since = None;
                Ok(())
            }
        }
    }
}

const _: () = assert!(ENTRIES * 8 == PAGE_SIZE, "a table is a page");
