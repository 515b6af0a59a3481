//! The hold policy of a runtime, [`Progress`] and the starvation token, in simulated time.
//!
//! As in `fabric-sharing`: a fault is reported before the protocol is asked, a page is held when it is
//! installed, holds end together, and the token is returned when its thread has progressed.
//!
//! An exploration has no time. There a hold ends at any time once its access is done, and before that
//! when nothing else can happen.

use fabric_pages::page::PageIndex;

use super::world::{Step, World, member};
use crate::cache::{Cache, Touch};
use crate::members::{Member, MemberSet};
use crate::mutation::Mutation;
use crate::progress::{GATHERING_MEMBERS_MAX, Need, Over, Progress, Seen};
use crate::token::STARVING_LOSSES;

/// Simulated time of a unit of holds.
const UNIT: u64 = 8;

/// Longest time of a gang, in units. Short, so that a run is much longer.
const LONGEST_UNITS: u64 = 512;

/// Requests of a node at once.
const ROOM: usize = 16;

/// The vCPU of a node, as a thread.
const THREAD: u32 = 1;

/// What a node knows of its vCPU's progress.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct Policy {
    pub(super) progress: Progress,
    /// Processor time of the vCPU up to the access in progress, and since when it runs without one.
    run: u64,
    idle_since: Option<u64>,
    /// Pages that are held, and since when.
    held: Vec<(PageIndex, u64)>,
    /// When the token is returned at the latest.
    token_until: u64,
    /// Pages that came, and accesses for which pages had to come.
    pub(super) came: u64,
    pub(super) turns: u64,
    came_before: u64,
    /// Pages that were requested ahead.
    pub(super) ahead: u64,
}

impl Policy {
    pub(super) fn new() -> Self {
        Self {
            progress: Progress::new(UNIT, LONGEST_UNITS * UNIT),
            run: 0,
            idle_since: None,
            held: Vec::new(),
            token_until: 0,
            came: 0,
            turns: 0,
            came_before: 0,
            ahead: 0,
        }
    }

    /// The processor time of the vCPU, which has none while it waits for a page, or to run with one.
    fn run_at(&self, now: u64) -> u64 {
        self.run + self.idle_since.map_or(0, |since| now - since)
    }

    /// When it wants to be called again.
    pub(super) fn next(&self, has_token: bool) -> Option<u64> {
        let token = has_token.then(|| {
            let settles = self.progress.settles_at(THREAD);
            settles.map_or(self.token_until, |at| at.min(self.token_until))
        });
        self.progress.next().into_iter().chain(token).min()
    }
}

impl<const P: usize> World<P> {
    /// Holds pages as a runtime does.
    pub(super) fn hold_by_policy(&mut self) {
        let (nodes, blocks) = (self.nodes.len(), self.writes.len() / P);
        let members: MemberSet = self.members().fold(MemberSet::EMPTY, MemberSet::with);
        for (node, me) in self.nodes.iter_mut().zip((0..).map(member)) {
            node.policy = Some(Policy::new());
            // An exploration has less room, which would be used up by what is requested ahead.
            let directories = (0..blocks).map(|block| member(block % nodes));
            node.cache = Cache::with_room(me, members, directories, ROOM);
        }
    }

    /// When the policy of a node is to be called.
    pub(super) fn policy_next(&self, me: Member) -> Option<u64> {
        let node = &self.nodes[me.index()];
        let policy = node.policy.as_ref().filter(|_| node.runs())?;
        policy.next(node.token.is_some())
    }

    /// A vCPU that waits for its next page keeps those that it has for longer than anything else takes
    /// that is in progress, but not for ever. With the token it keeps them until it has the next one.
    pub(super) fn patience_steps(&self, steps: &mut Vec<Step>) {
        for (me, node) in self.members().zip(&self.nodes) {
            let is_patient = node.token.is_some() || self.mutation == Some(Mutation::NeverEndHold);
            if node.runs() && !is_patient {
                let held = node.holds.iter().map(|page| Step::HoldOver(me, *page));
                steps.extend(held);
            }
        }
    }

    fn policy(&mut self, me: Member) -> Option<&mut Policy> {
        self.nodes[me.index()].policy.as_mut()
    }

    /// The vCPU waits for a page. Returns whether the access lost one early.
    pub(super) fn policy_waits(
        &mut self,
        me: Member,
        page: PageIndex,
        write: bool,
    ) -> Option<bool> {
        let now = self.now;
        let policy = self.policy(me)?;
        let run = policy.run_at(now);
        let seen: Seen = policy.progress.waits(THREAD, page, now, |_| Some(run));
        policy.progress.wants(THREAD, write);
        if seen.lost >= STARVING_LOSSES {
            self.want_token(me);
        }
        Some(seen.lost > 0)
    }

    /// A page came. Requests what the vCPU needs with it.
    pub(super) fn policy_asks_ahead(&mut self, me: Member, page: PageIndex) {
        if self.nodes.len() > GATHERING_MEMBERS_MAX {
            return;
        }
        let mut needs = Vec::new();
        let policy = self.policy(me);
        let found = policy.and_then(|policy| policy.progress.gather(page, &mut needs));
        if let Some((_, early)) = found {
            for need in needs {
                self.policy_asks(me, need, early);
            }
        }
    }

    fn policy_asks(&mut self, me: Member, need: Need, early: bool) {
        let Need { page, write } = need;
        let cache = &mut self.nodes[me.index()].cache;
        if !cache.may_ask(page, write) {
            return;
        }
        let mut actions = Vec::new();
        if cache.touch(page, write, early, &mut actions) == Touch::Waiting
            && let Some(policy) = self.policy(me)
        {
            policy.ahead += 1;
            policy.progress.asked(THREAD, page);
        }
        self.execute_all(me, actions);
    }

    /// The page is mapped, or its waiters try again.
    pub(super) fn policy_woken(&mut self, me: Member, page: PageIndex) {
        let now = self.now;
        if let Some(policy) = self.policy(me) {
            policy.progress.woken(page, now);
        }
    }

    /// A page was installed. One that came while the node has the token is held in any case.
    pub(super) fn policy_installed(&mut self, me: Member, page: PageIndex) {
        if let Some(policy) = self.policy(me) {
            policy.came += 1;
        }
        if self.nodes[me.index()].token.is_some() {
            self.policy_holds(me, page, 1);
        }
    }

    /// Begins a hold. Returns whether the node has a policy.
    pub(super) fn policy_holds(&mut self, me: Member, page: PageIndex, hold: u8) -> bool {
        let now = self.now;
        let Some(policy) = self.policy(me) else {
            return false;
        };
        let run = policy.run_at(now);
        policy.progress.hold(page, hold, now, |_| Some(run));
        policy.held.retain(|(held, _)| *held != page);
        policy.held.push((page, now));
        true
    }

    /// Ends what is over.
    pub(super) fn policy_step(&mut self, me: Member) {
        let now = self.now;
        while let Some(policy) = self.policy(me) {
            let run = policy.run_at(now);
            let Some(Over { page, .. }) = policy.progress.over(now, |_| Some(run)) else {
                break;
            };
            policy.held.retain(|(held, _)| *held != page);
            self.hold_over(me, page);
        }
        let Some(policy) = self.policy(me) else {
            return;
        };
        let run = policy.run_at(now);
        let until = policy.token_until;
        if policy
            .progress
            .is_token_over(THREAD, until, now, |_| Some(run))
        {
            self.return_token(me);
        }
        self.check_holds(me);
    }

    /// A hold has a bound, whatever the vCPU does.
    fn check_holds(&mut self, me: Member) {
        let (now, has_token) = (self.now, self.nodes[me.index()].token.is_some());
        let Some(policy) = self.policy(me) else {
            return;
        };
        let most = policy.progress.hold_max();
        let oldest = policy.held.iter().map(|(_, since)| now - since).max();
        if !has_token && oldest.is_some_and(|time| time > most) {
            self.fail(format!("{me} holds a page for longer than {most}"));
        } else if has_token && now > self.token_until(me) + most {
            self.fail(format!("{me} keeps the token"));
        }
    }

    fn token_until(&mut self, me: Member) -> u64 {
        self.policy(me).map_or(0, |policy| policy.token_until)
    }

    /// The node got the token. Returns whether it has a policy, which decides when to return it.
    pub(super) fn policy_got_token(&mut self, me: Member) -> bool {
        let now = self.now;
        let Some(policy) = self.policy(me) else {
            return false;
        };
        policy.token_until = now + policy.progress.gang_time();
        true
    }

    /// The vCPU begins an access.
    pub(super) fn policy_runs(&mut self, me: Member) {
        let now = self.now;
        if let Some(policy) = self.policy(me) {
            policy.run = policy.run_at(now);
            policy.idle_since = None;
        }
    }

    /// The vCPU is done with an access, and runs on. Returns whether the node has a policy.
    pub(super) fn policy_rests(&mut self, me: Member) -> bool {
        let now = self.now;
        let Some(policy) = self.policy(me) else {
            return false;
        };
        policy.idle_since = Some(now);
        policy.turns += u64::from(policy.came > policy.came_before);
        policy.came_before = policy.came;
        true
    }
}
