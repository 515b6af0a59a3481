//! Blocks that a node owns: a stand-in for the owner's protocol, in single steps.

use fabric_pages::page::PageIndex;

use super::node::{Mapped, Vcpu};
use super::world::{Stored, World};
use crate::action::LocalPage;
use crate::directory::block_index;
use crate::members::Member;
use crate::message::{Behind, BlockIndex};

impl<const P: usize> World<P> {
    pub(super) fn split_block(&mut self, me: Member, block: BlockIndex) {
        let node = &mut self.nodes[me.index()];
        let frames = &node.frames[block.index() * P..][..P];
        let pages = std::array::from_fn(|at| frames[at].local);
        let mut actions = Vec::new();
        node.cache.split(block, &pages, &mut actions);
        self.execute_all(me, actions);
        self.wake_block(me, block);
    }

    fn wake_block(&mut self, me: Member, block: BlockIndex) {
        if let Vcpu::Blocked(work) = self.nodes[me.index()].vcpu
            && block_index::<P>(work.page) == block
        {
            self.wake(me, work.page);
        }
    }

    pub(super) fn own_block(&mut self, me: Member, block: BlockIndex, pages: &[LocalPage]) {
        let frames = &mut self.nodes[me.index()].frames[block.index() * P..][..P];
        let locals = pages
            .iter()
            .copied()
            .chain(std::iter::repeat(LocalPage::Zero));
        let mut is_here = false;
        for (frame, local) in frames.iter_mut().zip(locals) {
            frame.local = local;
            let is_absent = matches!(local, LocalPage::Zero | LocalPage::Home);
            is_here |= is_absent && frame.mapped != Mapped::No;
            if is_absent {
                frame.value = None;
            }
        }
        if is_here {
            self.fail("a page is mapped that is not here");
        }
        let mut actions = Vec::new();
        self.nodes[me.index()].cache.owned(block, &mut actions);
        self.execute_all(me, actions);
        self.wake_block(me, block);
    }

    /// The owner's protocol, which is not the subject here, in one step.
    pub(super) fn touch_owned(&mut self, me: Member, page: PageIndex, write: bool) {
        let stored = self.homes[page.index()].value;
        let frame = self.frame(me, page);
        let behind = match frame.local {
            LocalPage::Zero => {
                frame.value = Some(0);
                Behind::Zero
            }
            LocalPage::Home => {
                frame.value = Some(stored);
                Behind::Home
            }
            LocalPage::Clean(behind) => behind,
            LocalPage::Dirty {
                in_flight,
                writable,
            } => {
                frame.local = LocalPage::Dirty {
                    writable: writable || write,
                    in_flight,
                };
                return self.map(me, page, write);
            }
        };
        frame.local = if write {
            LocalPage::Dirty {
                writable: true,
                in_flight: false,
            }
        } else {
            LocalPage::Clean(behind)
        };
        self.map(me, page, write);
    }

    pub(super) fn evict_owned(&mut self, me: Member, page: PageIndex) {
        let number = self.nodes[me.index()]
            .cache
            .owned_number(block_index::<P>(page));
        let frame = self.frame(me, page);
        let local = match (frame.local, frame.value) {
            (LocalPage::Clean(Behind::Zero), _) | (LocalPage::Dirty { .. }, Some(0)) => {
                LocalPage::Zero
            }
            (
                LocalPage::Dirty {
                    in_flight: false, ..
                },
                Some(value),
            ) => {
                let Some(number) = number else { return };
                let stored = &mut self.homes[page.index()];
                if !number.may_replace(stored.number) {
                    return self.fail("a home refuses the owner of the block");
                }
                *stored = Stored { number, value };
                LocalPage::Home
            }
            (LocalPage::Clean(Behind::Home), _) => LocalPage::Home,
            _ => return,
        };
        let frame = self.frame(me, page);
        frame.local = local;
        frame.mapped = Mapped::No;
        frame.value = None;
    }
}
