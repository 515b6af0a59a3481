//! Blocks that a node owns: a stand-in for the owner's protocol, in single steps.

use fabric_pages::page::PageIndex;

use super::node::{Mapped, Vcpu};
use super::world::World;
use crate::action::LocalPage;
use crate::cache::Written;
use crate::directory::{block_index, first_page};
use crate::members::Member;
use crate::message::{Behind, BlockIndex};
use crate::mutation::Mutation;

impl<const P: usize> World<P> {
    pub(super) fn split_block(&mut self, me: Member, block: BlockIndex) {
        let node = &mut self.nodes[me.index()];
        node.owned[block.index()] = false;
        let frames = &mut node.frames[block.index() * P..][..P];
        // What is being written back is here still, and stays: the answer means nothing.
        let pages = std::array::from_fn(|at| {
            frames[at].leaves = false;
            frames[at].local
        });
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
        let node = &mut self.nodes[me.index()];
        node.owned[block.index()] = true;
        let frames = &mut node.frames[block.index() * P..][..P];
        let locals = pages
            .iter()
            .copied()
            .chain(std::iter::repeat(LocalPage::Zero));
        let mut is_here = false;
        for (frame, local) in frames.iter_mut().zip(locals) {
            (frame.local, frame.leaves) = (local, false);
            let is_absent = matches!(local, LocalPage::Zero | LocalPage::Home);
            is_here |= is_absent && frame.mapped != Mapped::No;
            if is_absent {
                frame.value = None;
            }
        }
        if self.mutation == Some(Mutation::ForgetWritesOnWay) {
            self.forget_writes(me, block);
        }
        if is_here {
            self.fail("a page is mapped that is not here");
        }
        let mut actions = Vec::new();
        self.nodes[me.index()].cache.owned(block, &mut actions);
        self.execute_all(me, actions);
        self.wake_block(me, block);
    }

    fn forget_writes(&mut self, me: Member, block: BlockIndex) {
        let node = &mut self.nodes[me.index()];
        for page in (first_page::<P>(block)..).take(P).map(PageIndex::new) {
            if node.frames[page.index()].value.is_none() && node.is_writing(page) {
                node.forgotten.push(page);
            }
        }
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
            LocalPage::Dirty { writable } => {
                let writable = writable || write;
                frame.local = LocalPage::Dirty { writable };
                frame.leaves = false;
                return self.map(me, page, write);
            }
        };
        frame.local = if write {
            LocalPage::Dirty { writable: true }
        } else {
            LocalPage::Clean(behind)
        };
        self.map(me, page, write);
    }

    pub(super) fn evict_owned(&mut self, me: Member, page: PageIndex) {
        let frame = self.frame(me, page);
        let local = match frame.local {
            LocalPage::Clean(Behind::Zero) => LocalPage::Zero,
            LocalPage::Clean(Behind::Home) => LocalPage::Home,
            LocalPage::Dirty { .. } if !frame.leaves => {
                frame.mapped = Mapped::No;
                frame.leaves = true;
                frame.local = LocalPage::Dirty { writable: false };
                let block = block_index::<P>(page);
                let number = self.nodes[me.index()].cache.owned_number(block);
                return match number {
                    Some(number) => self.write_back(me, page, number),
                    None => self.fail("an owned block has no number"),
                };
            }
            _ => return,
        };
        self.leave(me, page, local);
    }

    /// A write-back of a page of an owned block ended.
    pub(super) fn written_owned(&mut self, me: Member, page: PageIndex, written: Written) {
        let leaves = std::mem::take(&mut self.frame(me, page).leaves);
        match written {
            Written::Refused if leaves => self.fail("a home refuses the owner of the block"),
            Written::Home if leaves => self.leave(me, page, LocalPage::Home),
            Written::Zero if leaves => self.leave(me, page, LocalPage::Zero),
            _ => {}
        }
    }

    fn leave(&mut self, me: Member, page: PageIndex, local: LocalPage) {
        let frame = self.frame(me, page);
        frame.local = local;
        frame.mapped = Mapped::No;
        frame.value = None;
    }
}
