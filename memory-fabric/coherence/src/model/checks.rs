//! What always holds.

use fabric_pages::page::PageIndex;

use super::node::{Mapped, Vcpu};
use super::world::{World, member};
use crate::action::LocalPage;
use crate::directory::{Loss, View, block_index};
use crate::members::Member;
use crate::message::Behind;

impl<const P: usize> World<P> {
    /// One writer and nobody else, or readers.
    pub(super) fn check_writers(&mut self, page: PageIndex) {
        let mapped = self.nodes.iter().filter(|node| node.runs());
        let mapped = mapped.map(|node| node.frames[page.index()].mapped);
        let (mut users, mut writers) = (0, 0);
        for mapped in mapped {
            users += u8::from(mapped != Mapped::No);
            writers += u8::from(mapped == Mapped::Writable);
        }
        if writers > 0 && users > 1 {
            self.fail("a page has a writer beside another user");
        }
    }

    /// Whether every request is served, nobody waits, and the last bytes of every page are where the
    /// directory says.
    pub(super) fn check_quiescent(&self) -> Result<(), String> {
        for node in self.nodes.iter().filter(|node| node.is_alive) {
            if let Vcpu::Blocked(work) | Vcpu::Trying(work) = node.vcpu {
                return Err(format!("nothing serves {:?}", work.access));
            }
            if node.runs() && (node.cache.is_waiting() || !node.directory.is_quiet()) {
                return Err("a transaction does not end".into());
            }
        }
        if self.crashed.is_some() {
            return Ok(());
        }
        if self.hostile.is_none() && !self.keeper.is_idle() {
            return Err("the token is not returned".into());
        }
        (0..).take(self.truth.len()).try_for_each(|number| {
            let page = PageIndex::new(number);
            match self.recovered(page) {
                Some(value) if value != Some(self.truth[page.index()]) => {
                    Err(format!("the last bytes of {page} are lost"))
                }
                _ => Ok(()),
            }
        })
    }

    /// The bytes of a page at the place that its directory names, unless it is in transit.
    fn recovered(&self, page: PageIndex) -> Option<Option<u16>> {
        let keeper = block_index::<P>(page).index() % self.nodes.len();
        let at = page.index();
        let behind = |behind| match behind {
            Behind::Zero => Some(0),
            Behind::Home => Some(self.homes[at].value),
        };
        match self.nodes[keeper].directory.view(page) {
            View::Busy => None,
            View::Unowned => Some(Some(0)),
            View::Owned(owner) => {
                let frame = &self.nodes[owner.index()].frames[at];
                Some(match frame.local {
                    LocalPage::Zero => behind(Behind::Zero),
                    LocalPage::Home => behind(Behind::Home),
                    LocalPage::Clean(_) | LocalPage::Dirty { .. } => frame.value,
                })
            }
            View::Page {
                holders,
                owner,
                behind: left,
            } => {
                let source = owner.filter(|owner| holders.contains(*owner));
                Some(match source {
                    Some(owner) => self.nodes[owner.index()].frames[at].value,
                    None => behind(left),
                })
            }
        }
    }

    /// Whether a survivor named everything that was lost.
    pub(super) fn check_losses(&mut self, me: Member, losses: &[Loss]) {
        for page in (0..).take(self.truth.len()).map(PageIndex::new) {
            let block = block_index::<P>(page);
            if member(block.index() % self.nodes.len()) != me {
                continue;
            }
            let is_named = losses.iter().any(|loss| match *loss {
                Loss::Page(lost) | Loss::InTransit(lost) => lost == page,
                Loss::Block(lost) => lost == block,
            });
            let truth = self.truth[page.index()];
            let is_there = self
                .recovered(page)
                .is_none_or(|value| value == Some(truth));
            if !is_named && !is_there {
                self.fail(format!("{page} is lost and not named"));
            }
        }
    }
}
